// Requests to the service: token, error messages, uploads and server-sent events.

const GONE = "The server does not answer. Check that dualrc serve is still running, then try again.";

/** Unsuccessful response; the message is shown to the user. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "" } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

export class Api extends EventTarget {
  #askToken;
  #asking = null;
  info = null;
  pendingFiles = null;
  requests = 0;

  /** askToken: async (wrong) => string, called when the service requires a token, or another one. */
  constructor(askToken) {
    super();
    this.#askToken = askToken;
    const found = location.hash.match(/^#token=(.+)$/);
    if (found) {
      sessionStorage.setItem("dualrc-token", decoded(found[1]));
      history.replaceState(null, "", location.pathname + location.search);
    }
  }

  get token() {
    return sessionStorage.getItem("dualrc-token");
  }

  /** Return a successful Response; throw an ApiError otherwise. */
  async fetch(method, path, { body = undefined, headers = {}, signal = undefined } = {}) {
    this.requests += 1;
    const sent = this.token;
    if (sent) headers = { ...headers, Authorization: `Bearer ${sent}` };
    let response;
    try {
      // A job can be cancelled while the page is left.
      response = await fetch(path, { method, body, headers, signal, keepalive: method === "DELETE" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw this.#gone();
    }
    this.dispatchEvent(new CustomEvent("reach", { detail: true }));
    if (response.ok) return response;
    if (response.status === 401) {
      // Other requests may have obtained the token in the meantime, or wait for the same answer.
      if (this.token === sent) await (this.#asking ??= this.#newToken(Boolean(sent)));
      return this.fetch(method, path, { body, headers, signal });
    }
    throw await this.#error(response);
  }

  #gone() {
    this.dispatchEvent(new CustomEvent("reach", { detail: false }));
    return new ApiError(GONE, { code: "gone" });
  }

  async #newToken(wrong) {
    sessionStorage.setItem("dualrc-token", await this.#askToken(wrong));
    this.#asking = null;
  }

  async #error(response) {
    let told = {};
    try {
      told = await response.json();
    } catch {
      // The body is not JSON, so the message contains only the status.
    }
    const wait = response.headers.get("Retry-After");
    let text = told.error ?? `The server answered ${response.status}. Try again, or read its log.`;
    if (wait && !/\d+ ?s/.test(text)) text += ` Try again in ${wait} s.`;
    return new ApiError(text, { status: response.status, code: told.code });
  }

  /** Send JSON and return the JSON of the response, or null without a body. */
  async json(method, path, body = undefined, signal = undefined) {
    const options = { signal };
    if (body !== undefined) {
      options.body = JSON.stringify(body);
      options.headers = { "Content-Type": "application/json" };
    }
    const response = await this.fetch(method, path, options);
    return response.status === 204 ? null : response.json();
  }

  async blob(path, signal = undefined) {
    return (await this.fetch("GET", path, { signal })).blob();
  }

  async buffer(path, signal = undefined) {
    return (await this.fetch("GET", path, { signal })).arrayBuffer();
  }

  /** Return an object URL for <img>, which cannot send the token itself; revoke it after use. */
  async objectUrl(path) {
    return URL.createObjectURL(await this.blob(path));
  }

  /** Upload an image and return {id, name, width, height, expires_s}. */
  async upload(file, signal = undefined) {
    const most = this.info?.max_bytes;
    if (most && file.size > most) {
      const size = (bytes) => `${bytes < 1e7 ? Number((bytes / 1e6).toPrecision(2)) : Math.round(bytes / 1e6)} MB`;
      throw new ApiError(`${file.name} has ${size(file.size)}; this server takes up to ${size(most)}. Choose a smaller file.`, { code: "too_large" });
    }
    const form = new FormData();
    form.append("file", file, file.name || "image.png");
    return (await this.fetch("POST", "v1/images", { body: form, signal })).json();
  }

  /** Follow a job and return the data of `done`. EventSource cannot send a token, so the stream is read here. */
  async events(job, onProgress = () => {}, signal = undefined) {
    const response = await this.fetch("GET", `v1/jobs/${job}/events`, { signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw this.#gone();
      }
      if (part.done) throw this.#gone();
      const blocks = (rest + part.value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parseEvent(block);
        if (event.name === "progress") onProgress(event.data);
        if (event.name === "done") return event.data;
        if (event.name === "failed") throw new ApiError(event.data.error, { code: event.data.code });
        // A job that the page cancels is no longer followed.
        if (event.name === "cancelled") throw new ApiError("The server has cancelled the match. Try again.", { code: "cancelled" });
      }
    }
  }
}

/** Decode a token of the address; a percent sign may stand for itself. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function parseEvent(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return { name, data: data.length ? JSON.parse(data.join("\n")) : null };
}
