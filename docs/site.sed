# What Doxygen 1.9 does not read in a page: code as the text of a link, and a link to a heading of another page.
s/\[`([^`]+)`\]/[\1]/g
s/\[\*\*`([^`]+)`\*\*\]/[**\1**]/g
s/(\.md)#[A-Za-z0-9_-]+\)/\1)/g
s/\[([^]]+)\]\(#[A-Za-z0-9_-]+\)/\1/g
