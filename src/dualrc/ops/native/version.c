/* Which sources this library was compiled from; library.py refuses it where they are not the package's. */

#include "native.h"

EXPORT const char *dualrc_sources(void)
{
    return DUALRC_SOURCES; /* given by setup.py */
}
