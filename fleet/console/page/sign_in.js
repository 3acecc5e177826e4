// Signing in: by the bootstrap token, by one of `operators.yaml`, or by single sign-on.

import { hasSingleSignOn, post } from "./api.js";
import { make } from "./elements.js";

export async function signInView(signedIn) {
  const token = make("input", { id: "token", type: "password", autocomplete: "off", required: true });
  const wrong = make("p", { class: "pill bad", role: "alert", hidden: true });
  const form = make(
    "form",
    { class: "sign-in" },
    make("label", {}, make("span", {}, "Token"), token),
    wrong,
    make("button", { type: "submit", class: "primary" }, "Sign in"),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await post("v1/session", { token: token.value.trim() });
      await signedIn();
    } catch (error) {
      wrong.textContent = error.message;
      wrong.hidden = false;
      token.select();
    }
  });
  const oidc = await hasSingleSignOn().catch(() => false);
  return make(
    "section",
    { class: "panel entrance", "aria-labelledby": "sign-in-title" },
    make("h2", { id: "sign-in-title" }, "Sign in"),
    oidc ? make("a", { class: "button", href: "v1/oidc/start" }, "Continue with single sign-on") : null,
    oidc ? make("p", { class: "quiet" }, "or with a token") : make("p", { class: "soft" }, ["The control plane keeps its own in the file ", make("code", {}, "bootstrap-token"), " of its data folder; those of ", make("code", {}, "operators.yaml"), " work too."]),
    form,
  );
}
