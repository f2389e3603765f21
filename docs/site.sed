# What Doxygen 1.9 does not read in a page: code as the text of a link, a link to a heading of another page, and the text of
# a link that continues on the next line. Reads a page as one line (sed -z).
s/\[`([^`]+)`\]/[\1]/g
s/\[\*\*`([^`]+)`\*\*\]/[**\1**]/g
s/\[([^][\n]*)\n *([^][\n]*)\]\(/[\1 \2](/g
s/(\.md)#[A-Za-z0-9_-]+\)/\1)/g
s/\[([^][]+)\]\(#[A-Za-z0-9_-]+\)/\1/g
