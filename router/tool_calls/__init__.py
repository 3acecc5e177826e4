"""Tool calls that models write as text: `schema` constrains the text, `parser` finds calls in it."""
