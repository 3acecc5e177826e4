"""Tool calls written as text by models: `schema` constrains the text, `parser` finds calls in it."""
