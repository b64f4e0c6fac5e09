"""The engine's own GPU kernels: `<topic>.metal` texts, the loader that launches them, and the variants they make.

Read in this order: `loader` (the form of a text and the rules of the dialect), `portable.h`, then a topic's pair of
`<topic>.metal` and `<topic>.py` (`attention_decode.metal` and `attention`).
"""
