// expect: llmmem needs exceptions
// flags: -fno-exceptions
// What the library cannot do without is said first, and once.
#include <llmmem/config.hpp>

int main() {}
