-- The tables of fencelock. Run it as often as you like: it creates what is missing and leaves data
-- as it is. SQLite has no schemas, so every name begins with fencelock_.
--
-- Names and resources are BLOBs: every byte counts, NUL included.

BEGIN IMMEDIATE;

-- One row: the identity of this data, the layout's version, the floor of new names, and how many
-- grants were made.
CREATE TABLE IF NOT EXISTS fencelock_meta (
    one     INTEGER PRIMARY KEY CHECK (one = 1),
    version INTEGER NOT NULL,
    realm   TEXT    NOT NULL CHECK (length(realm) = 32 AND realm NOT GLOB '*[^0-9a-f]*'),
    -- At least the last token of every name that was pruned, so that no token goes down (L10).
    floor   INTEGER NOT NULL DEFAULT 0 CHECK (floor >= 0),
    -- Goes up by one with each grant. A client that sees it go down knows that an old copy of the
    -- data was put in the place of this one.
    grants  INTEGER NOT NULL DEFAULT 0 CHECK (grants >= 0)
) STRICT;

INSERT INTO fencelock_meta (one, version, realm)
SELECT 1, {version}, lower(hex(randomblob(16))) WHERE NOT EXISTS (SELECT 1 FROM fencelock_meta);

-- One row for each lock name. A release leaves it, and with it the last token (L10).
CREATE TABLE IF NOT EXISTS fencelock_locks (
    name         BLOB PRIMARY KEY CHECK (length(name) BETWEEN 1 AND 512),
    last_token   INTEGER CHECK (last_token > 0),
    capacity     INTEGER CHECK (capacity BETWEEN 1 AND 1000),
    used_unix_us INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- One row for each grant that was neither given up nor found lapsed.
CREATE TABLE IF NOT EXISTS fencelock_holders (
    name           BLOB    NOT NULL,
    token          INTEGER NOT NULL CHECK (token > 0),
    id             BLOB    NOT NULL CHECK (length(id) = 16), -- the holder's secret
    ttl_ns         INTEGER NOT NULL CHECK (ttl_ns > 0),
    ends_ns        INTEGER NOT NULL, -- by the host's clock since boot
    boot           TEXT    NOT NULL, -- the boot that ends_ns belongs to
    time_namespace TEXT    NOT NULL,
    released       INTEGER NOT NULL CHECK (released IN (0, 1)), -- given up, and lingering
    info           BLOB    NOT NULL, -- JSON for people; decides nothing
    PRIMARY KEY (name, token)
) STRICT, WITHOUT ROWID;

-- One row for each fenced resource: its watermark. Never deleted (S1).
CREATE TABLE IF NOT EXISTS fencelock_fences (
    resource BLOB PRIMARY KEY CHECK (length(resource) BETWEEN 1 AND 512),
    token    INTEGER NOT NULL CHECK (token > 0),
    holder   TEXT CHECK (length(holder) = 32),
    seq      INTEGER NOT NULL DEFAULT 0 CHECK (seq >= 0),
    domain   TEXT
) STRICT, WITHOUT ROWID;

-- The values of the command line's `put` and `get`.
CREATE TABLE IF NOT EXISTS fencelock_values (
    resource BLOB PRIMARY KEY,
    value    BLOB NOT NULL,
    writer   INTEGER NOT NULL
) STRICT;

-- What no version of fencelock does, no one else does by oversight.
CREATE TRIGGER IF NOT EXISTS fencelock_tokens_never_go_down
BEFORE UPDATE OF last_token ON fencelock_locks
WHEN NEW.last_token IS NULL AND OLD.last_token IS NOT NULL OR NEW.last_token < OLD.last_token
BEGIN
    SELECT RAISE(ABORT, 'fencelock: the last token of a lock never goes down');
END;

CREATE TRIGGER IF NOT EXISTS fencelock_names_are_remembered
BEFORE DELETE ON fencelock_locks
WHEN OLD.last_token > (SELECT floor FROM fencelock_meta)
BEGIN
    SELECT RAISE(ABORT, 'fencelock: raise the floor before a name is forgotten');
END;

CREATE TRIGGER IF NOT EXISTS fencelock_floor_never_goes_down
BEFORE UPDATE OF floor ON fencelock_meta
WHEN NEW.floor < OLD.floor
BEGIN
    SELECT RAISE(ABORT, 'fencelock: the floor never goes down');
END;

CREATE TRIGGER IF NOT EXISTS fencelock_watermarks_never_go_down
BEFORE UPDATE OF token ON fencelock_fences
WHEN NEW.token < OLD.token
BEGIN
    SELECT RAISE(ABORT, 'fencelock: a watermark never goes down');
END;

CREATE TRIGGER IF NOT EXISTS fencelock_watermarks_are_remembered
BEFORE DELETE ON fencelock_fences
BEGIN
    SELECT RAISE(ABORT, 'fencelock: a watermark is never forgotten');
END;

-- REPLACE deletes without firing the triggers of a deletion, unless recursive_triggers is on: it is met
-- before it inserts.
CREATE TRIGGER IF NOT EXISTS fencelock_tokens_are_not_replaced
BEFORE INSERT ON fencelock_locks
WHEN EXISTS (SELECT 1 FROM fencelock_locks AS l
    WHERE l.name = NEW.name AND l.last_token > coalesce(NEW.last_token, 0))
BEGIN
    SELECT RAISE(ABORT, 'fencelock: the last token of a lock never goes down');
END;

CREATE TRIGGER IF NOT EXISTS fencelock_watermarks_are_not_replaced
BEFORE INSERT ON fencelock_fences
WHEN EXISTS (SELECT 1 FROM fencelock_fences AS f WHERE f.resource = NEW.resource AND f.token > NEW.token)
BEGIN
    SELECT RAISE(ABORT, 'fencelock: a watermark never goes down');
END;

CREATE TRIGGER IF NOT EXISTS fencelock_floor_is_not_replaced
BEFORE INSERT ON fencelock_meta
WHEN EXISTS (SELECT 1 FROM fencelock_meta)
BEGIN
    SELECT RAISE(ABORT, 'fencelock: the identity and the floor of this data are not replaced');
END;

CREATE TRIGGER IF NOT EXISTS fencelock_floor_is_remembered
BEFORE DELETE ON fencelock_meta
BEGIN
    SELECT RAISE(ABORT, 'fencelock: the identity and the floor of this data are not forgotten');
END;
