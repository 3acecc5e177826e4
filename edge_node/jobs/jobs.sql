CREATE TABLE IF NOT EXISTS jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, key TEXT NOT NULL, rank INTEGER NOT NULL,
    state TEXT NOT NULL, lane TEXT NOT NULL, due REAL NOT NULL, deadline REAL NOT NULL, ended REAL,
    bytes INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS jobs_by_key ON jobs (owner, key) WHERE key != '';
CREATE INDEX IF NOT EXISTS jobs_by_owner ON jobs (owner, seq);
CREATE INDEX IF NOT EXISTS jobs_waiting ON jobs (lane, rank, seq) WHERE state IN ('queued', 'waiting');
CREATE INDEX IF NOT EXISTS jobs_by_deadline ON jobs (deadline) WHERE ended IS NULL;
CREATE INDEX IF NOT EXISTS jobs_by_end ON jobs (state = 'dead', ended) WHERE ended IS NOT NULL;
CREATE INDEX IF NOT EXISTS jobs_empty ON jobs (ended) WHERE bytes = 0;
CREATE TABLE IF NOT EXISTS requests (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS results (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS replies (seq INTEGER PRIMARY KEY, due REAL, address BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS replies_by_due ON replies (due) WHERE due IS NOT NULL;
CREATE TABLE IF NOT EXISTS webhooks (
    number INTEGER PRIMARY KEY AUTOINCREMENT, seq INTEGER NOT NULL, due REAL NOT NULL, receiver TEXT NOT NULL,
    attempts INTEGER NOT NULL, notice BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS webhooks_by_due ON webhooks (due, receiver);
CREATE INDEX IF NOT EXISTS webhooks_by_job ON webhooks (seq);
CREATE TABLE IF NOT EXISTS webhook_secrets (
    owner TEXT PRIMARY KEY, secret TEXT NOT NULL, earlier TEXT NOT NULL, until REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS cancellations (
    key TEXT PRIMARY KEY, due REAL NOT NULL, deadline REAL NOT NULL, unknown INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS box (id INTEGER PRIMARY KEY, name TEXT NOT NULL, mark BLOB);
