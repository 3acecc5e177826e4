"""A fleet's folder: `fleet.yaml` is checked with the files that it names, and bundles are built from it."""
