"""`python -m tests.docs` (`make docs`): write the generated tables of all pages again."""

from .pages import pages, with_fresh_tables
from .tables import ROOT

for page in pages():
    text = page.read_text(encoding="utf-8")
    fresh = with_fresh_tables(text)
    if fresh != text:
        page.write_text(fresh, encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")
