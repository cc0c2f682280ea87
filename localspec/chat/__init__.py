"""Conversations: from a message to the stored reply, and the backend of this process.

One turn, in order:
1. `service.ChatService.submit` places the message in the conversation's tree (branches), refuses
   what cannot be served (context_room.check_servable), has the journal commit the message, and
   queues a `turn.Reply`.
2. `worker.Worker` takes it from the queue once there is a slot for it. A thread of its own makes
   the request from what the conversation holds by then (turn.request_of), and reads the chunks of
   `Backend.generate`.
3. `local.LocalBackend`, usually in the engine's own process (remote), renders the messages
   (template), lets the engine decode it beside the others (slots), and turns rounds of tokens into
   text (reply_text).
4. Each chunk makes a new `Reply.view`, which pages read; once a second the journal saves the text.
5. `Reply.end` says how it ended, whatever that was; the journal writes text, tokens and figures.

Two objects stand for a turn: `journal.PendingTurn` is what the log still needs of it, `turn.Reply`
is what runs. `backend_lifecycle` loads, unloads and replaces the backend that the worker uses.
Jobs beside replies wait in the same queue: a replay (audit), a race, the tune-up.
`log_service` reads and changes what needs no engine.
"""
