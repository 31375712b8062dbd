"""The parts of the races.

The modules: what every rival trains (data, model), how each rival trains (rivals, jax_rival, text_rivals), the processes (job, processes,
pinned, worker), the evaluation (figures, results, findings), and parts that the scripts share (command, host).
"""
