// A question before every change; the answer is what the change needs: a reason, or a bundle.

import { byId } from "./elements.js";

/**
 * Ask, and run the change when it is confirmed. The dialog stays open with the message if the change is refused.
 * Resolves to whether it was done.
 */
export function confirm({ title, text, button, danger = false, input = "Reason", required = false, value = "" }, change) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-name").textContent = input ?? "";
  byId("confirm-label").hidden = input === null;
  byId("confirm-input").required = required;
  byId("confirm-input").value = value;
  byId("confirm-error").hidden = true;
  byId("confirm-yes").textContent = button;
  byId("confirm-yes").classList.toggle("danger", danger);
  return new Promise((resolve) => {
    const ended = new AbortController();
    const finish = (done) => {
      ended.abort();
      byId("confirm-input").value = ""; // it may hold a secret
      dialog.close();
      resolve(done);
    };
    const once = { signal: ended.signal };
    byId("confirm-no").addEventListener("click", () => finish(false), once);
    dialog.addEventListener("cancel", () => finish(false), once);
    byId("confirm-form").addEventListener(
      "submit",
      async (event) => {
        event.preventDefault();
        byId("confirm-yes").disabled = true;
        try {
          await change(byId("confirm-input").value.trim());
          finish(true);
        } catch (error) {
          byId("confirm-error").textContent = error.message;
          byId("confirm-error").hidden = false;
        } finally {
          byId("confirm-yes").disabled = false;
        }
      },
      once,
    );
    dialog.showModal();
    (input === null ? byId("confirm-no") : byId("confirm-input")).focus();
  });
}
