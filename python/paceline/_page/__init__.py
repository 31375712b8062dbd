"""One page of a run: a file of HTML that needs no network and opens by a double click.

`run` is what a page shows, and what it concludes. `ledger`, the trainers and the pool fill it. `charts` and `schedule` say what is drawn, `document` writes the file.
"""
