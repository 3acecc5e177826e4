"""Files and records of the version before, rewritten with today's names (`router.renames`)."""
