// Requests to the daemon that served this page, and to nothing else.

import { byId } from "./elements.js";

const KEY = "causeway-api-key";

export class Refused extends Error {}

/** Return the JSON of a path; `body` makes it a POST. */
export const ask = async (path, body) => (await answer(path, body)).json();

/** Return the response of a path. Ask for the API key where one is needed. */
export async function answer(path, body) {
  for (;;) {
    const response = await send(path, body);
    if (response.status === 401) {
      await askForKey(sessionStorage.getItem(KEY) !== null);
      continue;
    }
    if (!response.ok) throw new Refused((await response.json()).error.message);
    return response;
  }
}

function send(path, body) {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : { authorization: `Bearer ${key}` };
  if (body === undefined) return fetch(path, { headers });
  return fetch(path, { method: "POST", headers: { ...headers, "content-type": "application/json" }, body: JSON.stringify(body) });
}

let asking = null;

function askForKey(again) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    if (again) byId("key-why").textContent = "This device does not know that key. Try another one.";
    byId("key").value = "";
    dialog.showModal();
    dialog.addEventListener(
      "close",
      () => {
        sessionStorage.setItem(KEY, byId("key").value.trim());
        asking = null;
        resolve();
      },
      { once: true },
    );
  });
  return asking;
}
