from tpengine.compat import aliases

aliases.add_names(__name__)
