// No answer of Gradio's queue stays unheard. Gradio takes an event by one request and brings its
// answer by another, a stream that the server closes as soon as nothing is left to answer. An event
// taken just before that, whose request is answered just after, finds its page believing that the
// stream is open: nobody reads what becomes of it until the next event. Noted here is what was
// taken and not yet answered; where the last stream ends before that, an event that does nothing
// makes Gradio listen again, and the server has kept the answer.
//
// It looks on only: requests and answers pass as they are.
import { command } from "./ui.js";

const SETTLED_MS = 60; // after which Gradio has seen the end of a stream, or opened the next
const COMPLETED = '"msg":"process_completed"';
const EVENT_ID = /"event_id":"([^"]+)"/;

const unanswered = new Set();
let numStreams = 0;
const ask = window.fetch;

window.fetch = async (...request) => {
  const { pathname } = new URL(request[0].url ?? request[0], location.href);
  if (pathname.endsWith("/queue/data")) return listening(request);
  const response = await ask.apply(window, request);
  if (pathname.endsWith("/queue/join") && response.ok) unanswered.add((await response.clone().json()).event_id);
  return response;
};

async function listening(request) {
  numStreams += 1;
  try {
    const response = await ask.apply(window, request);
    read(response.clone()).finally(ended);
    return response;
  } catch (error) {
    ended();
    throw error;
  }
}

async function read(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let begun = ""; // of a line
  try {
    for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
      const lines = (begun + value).split("\n");
      begun = lines.pop();
      for (const line of lines) if (line.includes(COMPLETED)) unanswered.delete(EVENT_ID.exec(line)?.[1]);
    }
  } catch {
    // Gradio leaves a stream that it was told is over; a broken one is Gradio's to report.
  }
}

function ended() {
  numStreams -= 1;
  setTimeout(() => {
    if (numStreams > 0 || unanswered.size === 0) return;
    unanswered.clear(); // each is asked for once: one that the server gave up never comes
    command({ do: "listen" }, { mayRepeat: true });
  }, SETTLED_MS);
}
