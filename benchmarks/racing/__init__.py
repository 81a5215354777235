"""The parts of `race.py`: gates, contestants, judge, floor, report."""
