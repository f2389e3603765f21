// Real system headers define these names as macros (complex.h, termios.h, windows.h), so the library may not
// use them.
#define I ) bait (
#define B0 ) bait (
#define small ) bait (
#define near ) bait (
#define far ) bait (
#define interface ) bait (
#define IN ) bait (
#define OUT ) bait (
#define ERROR ) bait (
#define STRICT ) bait (
