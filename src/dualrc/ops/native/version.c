/* Digest of the sources of this library. library.py rejects a library that does not match the package. */

#include "native.h"

EXPORT const char *dualrc_sources(void)
{
        /* setup.py defines this macro. */
        return DUALRC_SOURCES;
}
