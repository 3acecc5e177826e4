"""The pages: their reference tables are generated from the code, and their commands and programs are run.

    tables      one function per table
    pages       where a table stands in a page, and which fenced blocks a page has
    bench       how a page's blocks are run

`make docs` (`python -m tests.docs`) writes the tables again.
"""
