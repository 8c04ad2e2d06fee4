-- Batches, processes and calls. Purpose: commands that are counted together, and sagas.
--
-- Locks: ACCESS EXCLUSIVE on command for a moment (new columns without a default rewrite nothing), then SHARE for the
-- two partial indexes, which scan the table once and hold nothing of commands outside batches and processes.
-- Indexes: none on columns that settling changes.

-- step: 0 is a message to the process itself, n > 0 the process's n-th step, -n the compensation that is its n-th.
ALTER TABLE commandbus.command ADD COLUMN process bigint, ADD COLUMN step integer;
CREATE INDEX command_batch ON commandbus.command (batch, id) WHERE batch IS NOT NULL;
CREATE INDEX command_process ON commandbus.command (process, id) WHERE process IS NOT NULL;

-- A batch. Its counts are complete only together with what is in batch_delta. `on_complete` is what is sent in the
-- transaction that completes it (completion_sent_at: it was). `rate` is a moving average of members finished per
-- second, as of rate_at, when rate_count had finished. `retry_of`: the batch whose failed commands were sent again.
CREATE TABLE commandbus.batch (
    id                  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    domain              text NOT NULL,
    batch_id            text NOT NULL,
    name                text,
    holds               text NOT NULL DEFAULT 'commands' CHECK (holds IN ('commands', 'processes')),
    status              text NOT NULL DEFAULT 'PENDING'
                            CHECK (status IN ('PENDING', 'IN_PROGRESS', 'COMPLETED', 'COMPLETED_WITH_FAILURES', 'CANCELED')),
    is_open             boolean NOT NULL DEFAULT false,
    total               bigint NOT NULL DEFAULT 0,
    completed           bigint NOT NULL DEFAULT 0,
    failed              bigint NOT NULL DEFAULT 0,
    canceled            bigint NOT NULL DEFAULT 0,
    in_tsq              bigint NOT NULL DEFAULT 0,
    rate                float8 NOT NULL DEFAULT 0,
    rate_at             timestamptz,
    rate_count          bigint NOT NULL DEFAULT 0,
    created_at          timestamptz NOT NULL DEFAULT now(),
    started_at          timestamptz,
    finished_at         timestamptz,
    cancel              json,
    on_complete         json,
    completion_sent_at  timestamptz,
    custom_data         json,
    fingerprint         text,
    retry_of            bigint,
    CONSTRAINT batch_domain_batch_id_key UNIQUE (domain, batch_id)
) WITH (fillfactor = 50);
CREATE INDEX batch_to_cancel ON commandbus.batch (id) WHERE cancel IS NOT NULL AND finished_at IS NULL;

-- What settling, adding and operating did to a batch's counts since it was last folded: one row per batch and
-- transaction, so that no two transactions wait for one row. Nobody decides anything by these but `fold`.
CREATE TABLE commandbus.batch_delta (
    batch      bigint NOT NULL,
    total      integer NOT NULL DEFAULT 0,
    completed  integer NOT NULL DEFAULT 0,
    failed     integer NOT NULL DEFAULT 0,
    canceled   integer NOT NULL DEFAULT 0,
    in_tsq     integer NOT NULL DEFAULT 0
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
CREATE INDEX batch_delta_batch ON commandbus.batch_delta (batch);

-- A process (saga). `version` counts its moves: whoever moves it says which version it has seen. `in_tsq` is how many
-- of its commands are in the troubleshooting queue. `cancel`: somebody asked to cancel it. `failure`: why it does not go
-- on, or compensates. `timer`: the message that comes at its deadline.
CREATE TABLE commandbus.process (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    domain           text NOT NULL,
    process_id       text NOT NULL,
    process_type     text NOT NULL,
    status           text NOT NULL DEFAULT 'PENDING'
                         CHECK (status IN ('PENDING', 'IN_PROGRESS', 'WAITING_FOR_REPLY', 'WAITING_FOR_TSQ', 'COMPENSATING',
                                           'COMPLETED', 'COMPENSATED', 'FAILED', 'CANCELED')),
    is_compensating  boolean NOT NULL DEFAULT false,
    version          integer NOT NULL DEFAULT 0,
    in_tsq           integer NOT NULL DEFAULT 0,
    batch            bigint,
    timer            bigint,
    created_at       timestamptz NOT NULL DEFAULT now(),
    started_at       timestamptz,
    updated_at       timestamptz NOT NULL DEFAULT now(),
    finished_at      timestamptz,
    deadline_at      timestamptz,
    reply_to         text,
    correlation_id   text,
    data             json,
    state            json,
    cancel           json,
    failure          json,
    CONSTRAINT process_domain_process_id_key UNIQUE (domain, process_id)
) WITH (fillfactor = 50);
CREATE INDEX process_batch ON commandbus.process (batch, id) WHERE batch IS NOT NULL;
CREATE INDEX process_unfinished ON commandbus.process (batch) WHERE batch IS NOT NULL AND finished_at IS NULL;

-- The trail of a process: one row per command that it sent. `number` is counted from 1; `undoes` is the number of the
-- step that this one compensates. `closed` orders the steps by when their replies were handled.
CREATE TABLE commandbus.process_step (
    process       bigint NOT NULL,
    number        integer NOT NULL,
    name          text NOT NULL,
    undoes        integer,
    status        text NOT NULL DEFAULT 'SENT' CHECK (status IN ('SENT', 'COMPLETED', 'FAILED', 'CANCELED')),
    command       bigint NOT NULL,
    timer         bigint,
    domain        text NOT NULL,
    command_id    text NOT NULL,
    command_type  text NOT NULL,
    sent_at       timestamptz NOT NULL DEFAULT now(),
    deadline_at   timestamptz,
    finished_at   timestamptz,
    closed        integer,
    result        json,
    error         json,
    PRIMARY KEY (process, number)
) WITH (fillfactor = 70);

-- Replies that moved nothing, and why: late, duplicated, malformed, for an unknown or finished process.
CREATE TABLE commandbus.stray_reply (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    domain      text NOT NULL,
    process     bigint,
    message     json,
    reason      text NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX stray_reply_process ON commandbus.stray_reply (process) WHERE process IS NOT NULL;

-- Members finished per second, as a moving average over some ten seconds: what it was, and what happened since.
CREATE FUNCTION commandbus.moving_rate(rate float8, since timestamptz, count_then bigint, count_now numeric) RETURNS float8
    LANGUAGE sql STABLE AS $$
    SELECT rate + ((count_now - count_then::numeric)::float8 / seconds - rate)
                  * CASE WHEN count_then = 0 THEN 1::float8 ELSE 1::float8 - pg_catalog.exp(-seconds / 10::float8) END
      FROM (SELECT greatest(extract(epoch FROM pg_catalog.clock_timestamp() - since)::float8, 0.001) AS seconds) s
$$;
