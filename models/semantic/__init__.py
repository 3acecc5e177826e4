"""The semantic cache's parts: find a question asked before in other words, and refuse all that only look alike.

`protected` splits text and lists what must agree, `judge` is the learned part, `index` holds the entries. A text's
nearest neighbours are found by exact inner product among the entries whose protected words are the same; the judge then
says how likely their answers are the same, and a bound on held-back rows says how likely is enough. `Findings` test
that bound again on a device's own traffic.
"""
