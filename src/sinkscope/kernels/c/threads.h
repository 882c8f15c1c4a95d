/* Whether kernels work on one thread: those of OpenMP do not live on in a forked child, which would wait for them for
 * ever. */
extern int alone;
