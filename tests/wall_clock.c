/* The wall clock of a process, ahead of or behind the machine's by the nanoseconds that lie in the file that
 * WALL_CLOCK_FILE names. Preloaded; all other clocks are as they are. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000LL

typedef int (*reading)(clockid_t, struct timespec *);

static volatile const int64_t *ahead_ns;
static reading machine;

__attribute__((constructor)) static void begin(void) {
    machine = (reading)dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("WALL_CLOCK_FILE");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) abort();
    ahead_ns = mmap(NULL, sizeof *ahead_ns, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (ahead_ns == MAP_FAILED) abort();
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (machine == NULL) begin(); /* others are initialised before this library */
    int status = machine(clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = now->tv_sec * NS_PER_S + now->tv_nsec + *ahead_ns;
        now->tv_sec = ns / NS_PER_S;
        now->tv_nsec = ns % NS_PER_S;
    }
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *place) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (place != NULL) *place = precise.tv_sec;
    return precise.tv_sec;
}
