/* Run one C kernel on another processor, for tests/test_native.py: read a call from standard input, write its tensors.
 *
 * The call is the number of tensors, their sizes in bytes (-1 for NULL), the size of the other arguments, then the
 * contents of the tensors and of the other arguments. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int dualrc_consensus(const void *), dualrc_search(const void *), dualrc_meet(const void *);
int dualrc_explain(const void *), dualrc_fit(const void *);

static const struct {
    const char *name;
    int (*run)(const void *);
} kernels[] = {
    {"consensus", dualrc_consensus}, {"search", dualrc_search}, {"meet", dualrc_meet},
    {"explain", dualrc_explain},     {"fit", dualrc_fit},
};

static void take(void *to, size_t bytes)
{
    if (fread(to, 1, bytes, stdin) != bytes)
        exit(2);
}

int main(int count, char **names)
{
    int64_t tensors, sizes[32], rest;
    char *call;
    take(&tensors, sizeof tensors);
    take(sizes, tensors * sizeof *sizes);
    take(&rest, sizeof rest);
    call = calloc(1, tensors * sizeof(void *) + rest);
    void **pointers = (void **)call;
    for (int64_t t = 0; t < tensors; t++)
        if (sizes[t] >= 0)
            take(pointers[t] = malloc(sizes[t] + 1), sizes[t]);
    take(call + tensors * sizeof(void *), rest);
    for (size_t k = 0; count == 2 && k < sizeof kernels / sizeof *kernels; k++)
        if (strcmp(kernels[k].name, names[1]) == 0) {
            if (kernels[k].run(call))
                return 3;
            for (int64_t t = 0; t < tensors; t++)
                if (sizes[t] >= 0)
                    fwrite(pointers[t], 1, sizes[t], stdout);
            return 0;
        }
    return 4;
}
