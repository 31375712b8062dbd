"""One page of a run: a file of HTML that needs no network and opens by a double click.

`run` is what a page shows, and what it concludes. `ledger` and the trainers fill it. `pool` is what the page of a pool shows; `pool_ledger` and the pool fill that. `charts` and `schedule` say what is drawn, `document` writes the file.
"""
