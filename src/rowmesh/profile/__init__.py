"""One pass over data: which rows are asked for, how often, and together with which."""

from rowmesh.profile.collect import profile_batches, profile_source
from rowmesh.profile.counts import TableCounts
from rowmesh.profile.file import load_profile, save_profile
from rowmesh.profile.page import render_page
from rowmesh.profile.partial import remove_partial
from rowmesh.profile.result import Profile, TableProfile

__all__ = [
    "Profile",
    "TableCounts",
    "TableProfile",
    "load_profile",
    "profile_batches",
    "profile_source",
    "remove_partial",
    "render_page",
    "save_profile",
]
