"""Tool calls of models that write them as text: `schema` constrains the text, `parser` finds the calls in it."""
