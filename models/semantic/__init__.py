"""The parts of the semantic cache. It finds an earlier question with the same meaning, and refuses questions that only
look similar.

`protected` splits text into words and collects those that must agree, `judge` is the learned part, and `index` holds
the entries. A text's nearest neighbours are found by exact inner product among the entries whose protected words are
the same; the judge then estimates the probability that their answers are the same. The threshold for it was chosen on
held-back rows. `Findings` test that threshold again on a device's own traffic.
"""
