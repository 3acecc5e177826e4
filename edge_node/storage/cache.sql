CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, value BLOB NOT NULL, boot TEXT NOT NULL, monotonic_s REAL NOT NULL, unix_s REAL NOT NULL,
    used_unix_s REAL NOT NULL, owner TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answers_by_use ON answers (used_unix_s);
