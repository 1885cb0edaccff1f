/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The program's entry. The entry of a new glibc's crt1.o calls __libc_start_main of GLIBC_2.34, but the probe is
 * mounted into images of any age. This entry calls the oldest version.
 */
    /* Without this line aarch64's symbol table names the assembler's temporary file, and two builds differ. */
    .file "start.S"
    .section .note.GNU-stack, "", %progbits
    .text
    .globl _start
    .type _start, %function
#if defined(__x86_64__)
    .symver __libc_start_main, __libc_start_main@GLIBC_2.2.5
_start:
    .cfi_startproc
    .cfi_undefined rip
    xorl %ebp, %ebp
    movq %rdx, %r9          /* rtld_fini */
    movq (%rsp), %rsi       /* argc */
    leaq 8(%rsp), %rdx      /* argv */
    andq $-16, %rsp
    pushq %rax
    pushq %rsp              /* stack_end */
    xorl %r8d, %r8d         /* fini */
    xorl %ecx, %ecx         /* init: there are no constructors */
    leaq main(%rip), %rdi
    call *__libc_start_main@GOTPCREL(%rip)
    hlt
    .cfi_endproc
#elif defined(__aarch64__)
    .symver __libc_start_main, __libc_start_main@GLIBC_2.17
_start:
    .cfi_startproc
    .cfi_undefined x30
    mov x29, #0
    mov x30, #0
    mov x5, x0              /* rtld_fini */
    ldr x1, [sp]            /* argc */
    add x2, sp, #8          /* argv */
    mov x6, sp              /* stack_end */
    adrp x0, main
    add x0, x0, #:lo12:main
    mov x3, #0              /* init: there are no constructors */
    mov x4, #0              /* fini */
    bl __libc_start_main
    brk #0
    .cfi_endproc
#else
#error "start.S knows x86-64 and aarch64 only"
#endif
    .size _start, . - _start
