// The operators' API of the control plane that served this page.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Return the JSON of a path; null for an answer without a body. */
export async function ask(path, { method = "GET", body } = {}) {
  const headers = method === "GET" ? {} : { "x-causeway-console": "1", "content-type": "application/json" };
  const response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  const text = await response.text();
  let answer = null;
  try {
    answer = text ? JSON.parse(text) : null;
  } catch {
    throw new Refused(response.status, `The control plane answered ${response.status}.`);
  }
  if (!response.ok) throw new Refused(response.status, answer?.error?.message ?? `The control plane answered ${response.status}.`);
  return answer;
}

export const post = (path, body = {}) => ask(path, { method: "POST", body });

/** Return a path with the parameters that have a value. */
export function withQuery(path, parameters) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  return query.size ? `${path}?${query}` : path;
}

/** Whether a sign-in by OpenID Connect is configured: then the path leads elsewhere. */
export async function hasSingleSignOn() {
  const response = await fetch("v1/oidc/start", { redirect: "manual" });
  return response.type === "opaqueredirect" || response.status === 302;
}
