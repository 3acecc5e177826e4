// Two texts line by line, side by side: the longest common subsequence (Myers, Algorithmica 1, 1986).

const MOST_EDITS = 1000; // of more, time and memory grow with the square: such texts have nothing to compare

/** Return rows [left, right, kind]; a line that only one side has leaves the other null. kind: same, changed. */
export function sideBySide(before, after) {
  const [old, fresh] = [before.split("\n"), after.split("\n")];
  const rows = [];
  let [left, right] = [[], []];
  const flush = () => {
    for (let index = 0; index < Math.max(left.length, right.length); index += 1) rows.push([left[index] ?? null, right[index] ?? null, "changed"]);
    [left, right] = [[], []];
  };
  for (const [kind, line] of edits(old, fresh)) {
    if (kind === "same") {
      flush();
      rows.push([line, line, "same"]);
    } else (kind === "gone" ? left : right).push(line);
  }
  flush();
  return rows;
}

function edits(old, fresh) {
  let start = 0;
  while (start < old.length && start < fresh.length && old[start] === fresh[start]) start += 1;
  let end = 0;
  while (end < old.length - start && end < fresh.length - start && old.at(-1 - end) === fresh.at(-1 - end)) end += 1;
  const same = (lines) => lines.map((line) => ["same", line]);
  const [left, right] = [old.slice(start, old.length - end), fresh.slice(start, fresh.length - end)];
  return [...same(old.slice(0, start)), ...middle(left, right), ...same(old.slice(old.length - end))];
}

function middle(old, fresh) {
  const [n, m] = [old.length, fresh.length];
  const furthest = new Map([[1, 0]]);
  const trace = [];
  for (let distance = 0; distance <= Math.min(n + m, MOST_EDITS); distance += 1) {
    trace.push(new Map(furthest));
    for (let k = -distance; k <= distance; k += 2) {
      const down = k === -distance || (k !== distance && (furthest.get(k - 1) ?? -1) < (furthest.get(k + 1) ?? -1));
      let x = down ? (furthest.get(k + 1) ?? 0) : (furthest.get(k - 1) ?? 0) + 1;
      while (x < n && x - k < m && old[x] === fresh[x - k]) x += 1;
      furthest.set(k, x);
      if (x >= n && x - k >= m) return walkBack(trace, old, fresh);
    }
  }
  return [...old.map((line) => ["gone", line]), ...fresh.map((line) => ["new", line])];
}

function walkBack(trace, old, fresh) {
  let [x, y] = [old.length, fresh.length];
  const found = [];
  for (let distance = trace.length - 1; distance >= 0; distance -= 1) {
    const furthest = trace[distance];
    const k = x - y;
    const down = k === -distance || (k !== distance && (furthest.get(k - 1) ?? -1) < (furthest.get(k + 1) ?? -1));
    const fromK = down ? k + 1 : k - 1;
    const fromX = furthest.get(fromK) ?? 0;
    const fromY = fromX - fromK;
    while (x > fromX && y > fromY && x > 0 && y > 0) {
      x -= 1;
      y -= 1;
      found.push(["same", old[x]]);
    }
    if (distance === 0) break;
    if (down) found.push(["new", fresh[fromY]]);
    else found.push(["gone", old[fromX]]);
    [x, y] = [fromX, fromY];
  }
  return found.reverse();
}
