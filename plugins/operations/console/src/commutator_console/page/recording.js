// A recorded minute in place of a front door, for the documentation's copy of the page.

const EVERY_MS = 1000;
const EXPLAINS = "admin/live/decision?request=";

/** The recording at `url`: gzipped JSON with `snapshots` and, by request, `decisions`. */
export async function readRecording(url) {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
  const text = new Response(answer.body.pipeThrough(new DecompressionStream("gzip")));
  const { snapshots, decisions } = await text.json();
  return {
    /** What the front door would answer; it refuses what would change something. */
    answer(path, { method = "GET" } = {}) {
      const found = path.startsWith(EXPLAINS) ? decisions[decodeURIComponent(path.slice(EXPLAINS.length))] : null;
      if (method === "GET" && found) return Response.json(found);
      return Response.json({ error: { message: "This is a recording: nothing in it can be changed." } }, { status: method === "GET" ? 404 : 409 });
    },
    /** Gives `show` the snapshots one after another, with the times of now, for ever; `again` is called before each beginning. */
    play(show, again) {
      let at = 0, shiftS = 0;
      const step = () => {
        if (document.hidden) return;
        if (at === 0) { shiftS = Date.now() / 1000 - snapshots[0].time_unix_s; again(); }
        show(shifted(snapshots[at], shiftS));
        at = (at + 1) % snapshots.length;
      };
      step();
      setInterval(step, EVERY_MS);
    },
  };
}

/** A snapshot with all of its times later by `shiftS`. */
function shifted(snapshot, shiftS) {
  return JSON.parse(JSON.stringify(snapshot), (name, value) => (name.endsWith("time_unix_s") || name.endsWith("since_unix_s") || name === "time") && typeof value === "number" ? value + shiftS : value);
}
