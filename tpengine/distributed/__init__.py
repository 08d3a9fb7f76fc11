from tpengine import aliases

aliases.add_names(__name__)
