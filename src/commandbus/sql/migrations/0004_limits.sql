-- Limits, back-off and breakers. Purpose: what the whole fleet knows of the external resources that it shares.
--
-- Locks: ACCESS EXCLUSIVE on parked for a moment (new columns without a default that must be computed).
-- Indexes: of waiting rows only, so that 10,000 of them cost nobody else anything.

-- One row per limit, and everything that must change at once in it: one UPDATE decides, and one that had to wait for
-- another sees its outcome. `declared` is what code and commandbus.toml say, `override` what a person has set; the plain
-- columns are what follows from both. `holders`: token → epoch second at which its lease ends (where the back end is
-- PostgreSQL). `tat`: when the bucket of the rate will be empty. `flow`: places given, decaying,
-- as of flow_at, counted since flow_since.
--
-- Back-off: `step` 429s in a row, nobody begins before `until`, then one probe. Breaker: after `failures` bad calls in a
-- row is_open until open_until, then one probe too; is_forced: a person has opened it, and a person closes it.
CREATE TABLE commandbus.limits (
    name              text PRIMARY KEY CHECK (name ~ '^[a-z][a-z0-9_]{0,47}$'),
    environment       text NOT NULL,
    backend           text NOT NULL CHECK (backend IN ('postgres', 'redis')),
    concurrency       integer,
    per_second        float8,
    burst             integer NOT NULL DEFAULT 1,
    lease             float8 NOT NULL,
    max_wait          float8,
    tries             integer NOT NULL,
    backoff           float8[] NOT NULL,
    breaker_failures  integer NOT NULL,
    breaker_reset     float8 NOT NULL,
    declared          json,
    override          json,
    changed_at        timestamptz NOT NULL DEFAULT now(),
    holders           jsonb NOT NULL DEFAULT '{}',
    tat               float8 NOT NULL DEFAULT 0,
    flow              float8 NOT NULL DEFAULT 0,
    flow_at           float8 NOT NULL DEFAULT 0,
    flow_since        float8 NOT NULL DEFAULT 0,
    step              integer NOT NULL DEFAULT 0,
    until             timestamptz,
    reason            text,
    failures          integer NOT NULL DEFAULT 0,
    is_open           boolean NOT NULL DEFAULT false,
    is_forced         boolean NOT NULL DEFAULT false,
    opened_at         timestamptz,
    open_until        timestamptz,
    open_reason       text,
    probe             text,
    probe_until       timestamptz,
    granted           bigint NOT NULL DEFAULT 0,
    rate_limited      bigint NOT NULL DEFAULT 0,
    waits             bigint NOT NULL DEFAULT 0,
    waited_seconds    float8 NOT NULL DEFAULT 0
) WITH (fillfactor = 30, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

-- Who waits for a limit or a breaker. Turns go by `since` (when a command was sent), so that a command keeps its turn
-- however often it is parked. Whose turn has come has woken_at, and under `token` a place that is kept for it for a
-- moment; such a row has no further use. `probes`: how often it was the probe of a back-off in vain; another comes first
-- then, so that one command that is always refused does not hold up all. `until`: what it was told; `note`: why, for people. give_up_at: when it needs a
-- person. reason: 'pause', 'limit', 'breaker'; 'call' is a caller inside a program (domain '', command 0) that hears its
-- token on the channel commandbus_limits.
ALTER TABLE commandbus.parked
    ADD COLUMN limit_name  text,
    ADD COLUMN since       timestamptz,
    ADD COLUMN until       timestamptz,
    ADD COLUMN give_up_at  timestamptz,
    ADD COLUMN woken_at    timestamptz,
    ADD COLUMN token       text,
    ADD COLUMN probes      integer NOT NULL DEFAULT 0,
    ADD COLUMN note        text;
CREATE INDEX parked_limit ON commandbus.parked (limit_name, since, command, seq)
 WHERE limit_name IS NOT NULL AND woken_at IS NULL;
CREATE INDEX parked_woken ON commandbus.parked (woken_at) WHERE woken_at IS NOT NULL;
CREATE INDEX parked_give_up ON commandbus.parked (give_up_at) WHERE give_up_at IS NOT NULL;

-- Breakers of command types. stuck_at, failed_at: when attempts ended badly, within the window. `probe` is the command
-- that may run while it is half open; probe_until: its message is gone, and another one is chosen if nothing is heard of
-- it by then. is_forced: a person has opened it. `refuses`: sends are refused while it is open.
CREATE TABLE commandbus.breaker (
    domain          text NOT NULL,
    command_type    text NOT NULL,
    state           text NOT NULL DEFAULT 'CLOSED' CHECK (state IN ('CLOSED', 'OPEN', 'HALF_OPEN')),
    stuck_at        timestamptz[] NOT NULL DEFAULT '{}',
    failed_at       timestamptz[] NOT NULL DEFAULT '{}',
    window_seconds  float8 NOT NULL DEFAULT 3600,
    reset           float8 NOT NULL DEFAULT 60,
    refuses         boolean NOT NULL DEFAULT false,
    is_forced       boolean NOT NULL DEFAULT false,
    opened_at       timestamptz,
    until           timestamptz,
    reason          text,
    probe           bigint,
    probe_until     timestamptz,
    PRIMARY KEY (domain, command_type)
) WITH (fillfactor = 50);

-- What was done to limits and breakers, by people and by commandbus itself (operator 'commandbus').
-- subject: 'limit docai', 'breaker docai' or 'breaker orders/ship'.
CREATE TABLE commandbus.control_action (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subject       text NOT NULL,
    action        text NOT NULL,
    operator      text NOT NULL,
    reason        text,
    details       json,
    performed_at  timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX control_action_subject ON commandbus.control_action (subject, id);

-- Programs that use limits kept in Redis: since when it is out of their reach (null: it is not), and what they hold of
-- each limit: at most so many, or, while it is out of reach, which tokens until when. One row each, beaten while in use.
CREATE TABLE commandbus.limit_client (
    id          text PRIMARY KEY,
    started_at  timestamptz NOT NULL DEFAULT now(),
    beat_at     timestamptz NOT NULL DEFAULT now(),
    lost_at     timestamptz,
    held        jsonb NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50);

-- One row: where the places of Redis limits are kept now. redis: there. degraded: every program keeps to its share.
-- joining: holders register with a Redis that is back or has lost its data; nobody else begins before `until`.
CREATE TABLE commandbus.limit_mode (
    id      integer PRIMARY KEY DEFAULT 1 CHECK (id = 1),
    mode    text NOT NULL DEFAULT 'redis' CHECK (mode IN ('redis', 'degraded', 'joining')),
    epoch   text,
    since   timestamptz NOT NULL DEFAULT now(),
    until   timestamptz
);
INSERT INTO commandbus.limit_mode DEFAULT VALUES;
