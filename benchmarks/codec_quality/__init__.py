"""The parts of `bench_codec_quality.py`: data, arms, one run, the report."""
