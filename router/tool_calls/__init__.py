"""Tool calls that models write as text: `schema` and `formats` constrain the text, `parser` finds calls in it,
`ids` names them."""
