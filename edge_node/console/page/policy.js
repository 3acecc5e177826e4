// A draft beside the active policy. The device checks it and replays its newest decisions; it has no solver for proofs.

import { ask } from "./api.js";
import { byId, make, show } from "./elements.js";
import { Playground } from "./playground.js";

export function wirePlayground() {
  const button = byId("policy-open");
  button.addEventListener("click", async () => {
    const open = byId("playground").hidden;
    byId("playground").hidden = !open;
    button.setAttribute("aria-expanded", String(open));
    if (!open) return;
    byId("playground").focus();
    if (byId("playground-body").childElementCount === 0) await fill();
  });
}

async function fill() {
  try {
    const { text, old } = await ask("console/policy", {});
    const playground = new Playground({
      base: text,
      name: old,
      check: (policy) => ask("console/policy", { policy }),
      next: "To activate a draft, save it as the policy file: the daemon loads a changed file on its own.",
      unproved: "Proofs run on the control plane, whose console has this page, too, or with `causeway-fleet prove`: a device installs no solver.",
    });
    show(byId("playground-body"), playground.node);
  } catch (error) {
    show(byId("playground-body"), make("p", { class: "pill bad" }, error.message));
  }
}
