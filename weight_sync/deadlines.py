"""How long the parties of weight sync wait for each other. What a user may change is `weight_sync.timeout_s`, the
deadline of a whole sync: it bounds everything here.

    answer   resend 1 s, ping 1 s ─> silent for 10 s: the peer is lost
    pin      30 s, renewed every 10 s ─> ends by itself with its coordinator
    close    10 s for everybody together, 2 s at least for each step
"""

HANDSHAKE_S = 5.0
"""A connection that has not shown its key by then is closed."""
HEARTBEAT_S, HEARTBEAT_TIMEOUT_S = 2.0, 10.0
"""Connections to hosts that vanished are closed after this time."""

RESEND_S = 1.0
"""A request without an answer is sent again."""
PING_S = 1.0
"""How often a peer that takes long to answer is asked whether it is there."""
PEER_TIMEOUT_S = 10.0
"""A control thread answers a ping in well under a millisecond, so a peer that does not is stopped or gone."""
GRACE_S = 0.2
"""For a question at the end of a deadline, or after a failure."""
ANSWER_S = 5.0
"""A party bounds its own time; its host gets this much longer before we stop waiting for the answer."""
WATCH_AFTER_S = 1.0
"""The host of a replica that has not brought its version by then is asked whether the engine lives."""
LINK_S = 10.0
"""For all workers to learn whom to read from; they read from the learners if they do not."""
LOOK_S = 0.05
"""Between two looks at what nobody announces."""

PIN_TTL_S = 30.0
"""A learner keeps a version for so long after its coordinator died."""
RENEW_S = 10.0
MAX_PIN_S = 60.0
"""A learner refuses longer pins."""
UNPIN_S = 2.0
"""A learner answers at once; one that does not lets the pin run out."""

CLOSE_S = 10.0
UNLINK_S = 2.0
"""Control threads answer at once, and unmapping takes milliseconds."""
SENDERS_CLOSE_S = 5.0
"""For threads that send to receivers, before what they use is freed."""
