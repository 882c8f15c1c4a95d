#include "threads.h"

int alone = 0;

void work_alone(void) { alone = 1; }
