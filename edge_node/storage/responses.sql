CREATE TABLE IF NOT EXISTS objects (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, name TEXT NOT NULL, place TEXT NOT NULL,
    expires REAL NOT NULL, bytes INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (owner, name)
);
CREATE INDEX IF NOT EXISTS objects_by_place ON objects (owner, place, seq);
CREATE INDEX IF NOT EXISTS objects_by_expiry ON objects (expires);
CREATE TABLE IF NOT EXISTS device (id INTEGER PRIMARY KEY, mark BLOB NOT NULL);
