"""The rewriting of the previous version's files and records with the present names (`router.renames`)."""
