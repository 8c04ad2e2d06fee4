"""What the bus costs, as ratios measured in one run: `./dev bench [--quick] [--json FILE]`.

Floors and bus alternate round by round on one server (fsync on), each figure is the median of its rounds, and
the run ends by counting that nothing was lost. The machine may be noisy: compare the ratios, not the figures.
"""
