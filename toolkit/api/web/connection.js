
// Requests to the server.

/** Return the API key. It is kept in this tab, until it is closed. */
function readKey() {
  return readStorage("sessionStorage", "tk-api-key", "");
}

function writeKey(key) {
  writeStorage("sessionStorage", "tk-api-key", key);
}

class ServerError extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Send a request to a path below the page's. Raises ServerError, or AbortError if stopped. */
async function send(path, { body, signal } = {}) {
  const key = readKey();
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, body: body && JSON.stringify(body), cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Check that it is running.");
  }
  if (response.ok) return response;
  const found = await response.json().catch(() => ({}));
  const message = found.error?.message ?? `The server answered with status ${response.status}.`;
  throw new ServerError(message, { status: response.status, code: found.error?.code });
}

/** Yield the events of a stream. Raises ServerError if it breaks off. */
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      part = { done: true };
    }
    if (part.done) throw new ServerError("The connection ended before the answer did.");
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment, which keeps the connection
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const value = JSON.parse(data);
      if (value.error) throw new ServerError(value.error.message, value.error);
      yield value;
    }
  }
}
