// Two texts line by line, side by side: the longest common subsequence (Myers, Algorithmica 1, 1986).

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
  const [n, m] = [old.length, fresh.length];
  let furthest = new Map([[1, 0]]);
  const trace = [];
  for (let distance = 0; distance <= n + m; distance += 1) {
    trace.push(new Map(furthest));
    for (let k = -distance; k <= distance; k += 2) {
      const down = k === -distance || (k !== distance && (furthest.get(k - 1) ?? -1) < (furthest.get(k + 1) ?? -1));
      let x = down ? (furthest.get(k + 1) ?? 0) : (furthest.get(k - 1) ?? 0) + 1;
      while (x < n && x - k < m && old[x] === fresh[x - k]) x += 1;
      furthest.set(k, x);
      if (x >= n && x - k >= m) return walkBack(trace, old, fresh);
    }
  }
  return [];
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
