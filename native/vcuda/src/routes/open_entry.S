/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dlopen. vgpu_opening(path, flags) returns two registers: libc's own function, and the flags for it. Control passes to
 * that function by a jump, so that it sees the true caller.
 */
    .section .note.GNU-stack, "", %progbits
    .text
    .hidden vgpu_opening

#if defined(__x86_64__)

    .globl dlopen
    .type dlopen, @function
dlopen:
    .cfi_startproc
    endbr64
    pushq %rdi
    .cfi_adjust_cfa_offset 8
    call vgpu_opening
    popq %rdi
    .cfi_adjust_cfa_offset -8
    movl %edx, %esi
    testq %rax, %rax
    jz 1f
    jmpq *%rax
1:  ret
    .cfi_endproc
    .size dlopen, . - dlopen

#elif defined(__aarch64__)

    .globl dlopen
    .type dlopen, %function
dlopen:
    .cfi_startproc
    hint #34 /* bti c */
    stp x29, x30, [sp, #-32]!
    .cfi_def_cfa_offset 32
    .cfi_offset 29, -32
    .cfi_offset 30, -24
    mov x29, sp
    str x0, [sp, #16]
    bl vgpu_opening
    mov x9, x0
    ldr x0, [sp, #16]
    ldp x29, x30, [sp], #32
    .cfi_restore 29
    .cfi_restore 30
    .cfi_def_cfa_offset 0
    cbz x9, 1f
    br x9
1:  mov x0, xzr
    ret
    .cfi_endproc
    .size dlopen, . - dlopen

#else
#error "open_entry.S knows x86-64 and aarch64 only"
#endif
