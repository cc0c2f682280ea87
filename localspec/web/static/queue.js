// Mends two faults of Gradio's queue, from outside: this file wraps window.fetch.
//
// Gradio posts an event in one request and reads its answer from another, a stream that the server
// closes when nothing is left to answer.
// 1. An event that the server accepts just before it closes the stream is answered on no stream:
//    the page still believes that the stream is open. This file notes which events are accepted and
//    not yet answered. If the last stream ends before their answers, it sends an event that does
//    nothing, which makes Gradio open a stream; the server has kept the answers.
// 2. Gradio leaves a stream by aborting its request, also when the page is closed or reloaded, and
//    then reports the abort as a lost connection. Here a stream that Gradio leaves ends normally.
// It imports nothing, so that it is there before Gradio opens its first stream.
const SETTLE_MS = 60; // Gradio has then seen the end of a stream, or opened the next
const COMPLETED = '"msg":"process_completed"';
const EVENT_ID = /"event_id":"([^"]+)"/;

const unanswered = new Set(); // accepted, its answer not read yet
const early = new Set(); // its answer read before it was known to be accepted
let numStreams = 0;
const nativeFetch = window.fetch;

window.fetch = async (...asked) => {
  const { pathname } = new URL(asked[0].url ?? asked[0], location.href);
  if (pathname.endsWith("/queue/data")) return answerStream(new Request(...asked));
  const response = await nativeFetch.apply(window, asked);
  if (pathname.endsWith("/queue/join") && response.ok) pair((await response.clone().json()).event_id, unanswered, early);
  return response;
};

// An event is accepted once and answered once; on a crowded machine either may be read first.
function pair(id, kept, other) {
  if (!other.delete(id)) kept.add(id);
}

async function answerStream(request) {
  numStreams += 1;
  try {
    const response = await nativeFetch(request);
    return new Response(readAlong(response.body, request.signal), response);
  } catch (error) {
    streamEnded();
    if (request.signal.aborted) return new Response(null);
    throw error;
  }
}

// The same bytes as `body`, noting the answers in them; ends when `left` says so.
function readAlong(body, left) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let line = ""; // its beginning
  let isOpen = true;
  const note = (bytes) => {
    const lines = (line + decoder.decode(bytes, { stream: true })).split("\n");
    line = lines.pop();
    for (const each of lines) if (each.includes(COMPLETED)) pair(EVENT_ID.exec(each)?.[1], early, unanswered);
  };
  const end = (out, error) => {
    if (!isOpen) return;
    isOpen = false;
    if (error) out.error(error); // a broken connection is Gradio's to report
    else out.close();
    streamEnded();
  };
  return new ReadableStream({
    start(out) {
      const leave = () => end(out);
      if (left.aborted) leave();
      else left.addEventListener("abort", leave, { once: true });
    },
    async pull(out) {
      try {
        const { value, done } = await reader.read();
        if (done) end(out);
        else if (isOpen) { note(value); out.enqueue(value); }
      } catch (error) {
        end(out, error);
      }
    },
  });
}

function streamEnded() {
  numStreams -= 1;
  const missing = [...unanswered]; // for what is accepted from now on Gradio itself opens a stream
  setTimeout(() => {
    if (numStreams > 0 || !missing.some((id) => unanswered.has(id))) return;
    unanswered.clear(); // asked for once: an answer that the server has dropped never comes
    window.dispatchEvent(new CustomEvent("ls-command", { detail: { do: "listen" } }));
  }, SETTLE_MS);
}

// And what costs most of an event's time on the page: at each of its steps Gradio has the browser copy
// what components hold, value by value, also what is no object and needs no copy.
const nativeClone = window.structuredClone;
window.structuredClone = (value, ...options) => (value && typeof value === "object" ? nativeClone(value, ...options) : value);
