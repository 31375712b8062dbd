"""The parts of the races.

What every rival trains (data, model), how each trains (rivals, jax_rival, text_rivals), in which process (job, processes, pinned, worker),
what comes of it (figures, results, findings), and what the scripts share (command, host).
"""
