"""What the pages of device and fleet at `/console` share.

page        theme, icon, and scripts that both pages load
page_files  the paths of a page, and the response for each file
"""
