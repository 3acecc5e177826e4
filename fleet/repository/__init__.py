"""A fleet's folder of plain files: `fleet.yaml`, policies with their cases, and the bundles built from them."""
