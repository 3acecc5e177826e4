"""Tests of the room `router.variants`."""
